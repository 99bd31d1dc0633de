"""`submit --on slurm`: the script of an array of one-node jobs, Slurm's commands, and what its queue says."""
