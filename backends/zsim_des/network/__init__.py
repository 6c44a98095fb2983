"""The network of a simulated cluster: links, routes, loads, and how activities share them."""
