"""The checks of ``ds_bamboo doctor``, one topic a file. Each check is a function of a Subject."""
