"""Tests of Polyad; folders mirror the packages."""
