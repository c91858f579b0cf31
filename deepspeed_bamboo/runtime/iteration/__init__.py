"""One training iteration or evaluation, undisturbed: data, passes, redundant forwards, and its end."""
