"""Draw SVG pictures: a canvas, and drawings of clusters, nodes, fabrics and charts."""
