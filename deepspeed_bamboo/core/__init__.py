"""Pure logic: placements, schedules, recovery plans, costs. Standard library only; values in, values out."""
