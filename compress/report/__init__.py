"""The report: the manifests of a run, collected in one JSON document and one HTML page."""
