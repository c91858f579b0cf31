"""What ``ds_bamboo doctor`` looks at before a job is started: one small check a file, each a function of a Subject."""
