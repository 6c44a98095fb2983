"""Pictures as SVG: a canvas, clusters, nodes and fabrics on it."""
