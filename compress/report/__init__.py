"""The report: everything that the manifests of a run say, as one JSON document and one HTML page."""
