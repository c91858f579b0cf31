"""After a loss: abort, consensus, take-over, shadow rebuild and state transfer."""
