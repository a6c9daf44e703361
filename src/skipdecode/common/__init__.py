"""Tools for all rooms: files, JSON lines, records, options, the log of a run, progress, environment. No torch."""
