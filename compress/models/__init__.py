"""Models: imported, loaded, measured, and understood by their structure alone."""
