"""Tools for all rooms: files, JSON lines, records, options, journals, progress, environment. No torch."""
