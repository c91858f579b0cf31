"""Where checkpoints are kept: directories, S3, and the rules of the place that one job owns."""
