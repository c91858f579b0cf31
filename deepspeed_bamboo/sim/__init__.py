"""A discrete-event simulator of training on spot machines: what will it cost, under which policy?

`ds_bamboo simulate` is cli.py. In code: scenario.load_preset, jobs.build_job, runner.run_seeds, results.Summary.
Predictors (predict.py) and the liveput planner (liveput.py) are pure functions that can also be used online.
Imports neither torch nor deepspeed.
"""
