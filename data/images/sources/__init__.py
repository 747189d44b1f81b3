"""Sources of images, one module each: they are read in place, and never extracted."""
