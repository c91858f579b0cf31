"""What connects one worker process to its job: session, status, what it prints."""
