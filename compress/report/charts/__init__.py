"""The geometry of charts: where points, lines, ticks and labels go. The templates draw them as SVG."""
