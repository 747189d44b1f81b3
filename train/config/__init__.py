"""What a run is: its configuration, checked, and what it will do."""
