"""Run folders: methods, networks and settings by name, their results and predictions."""
