"""Reports: any mix of result files as one HTML page that needs nothing else."""
