"""Sources of images, a file each: they are read in place, and never extracted."""
