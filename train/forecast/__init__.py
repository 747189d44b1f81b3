"""What a run would take and cost on machines that need not be there."""
