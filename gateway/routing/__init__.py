"""Worker selection: the fleet, free capacity on each worker, and the admission queue."""
