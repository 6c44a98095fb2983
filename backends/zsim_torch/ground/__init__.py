"""What all rooms of the backend use."""
