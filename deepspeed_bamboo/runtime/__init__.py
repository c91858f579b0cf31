"""The part of the plugin that runs inside a worker; the only importer of torch and deepspeed."""
