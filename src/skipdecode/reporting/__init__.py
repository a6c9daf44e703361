"""Pictures of results as PNG files, and what prepared schedules keep of full depth's scores."""
