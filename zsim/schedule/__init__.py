"""The schedule: operations, layouts, groups; a builder, validation, ordering, and JSON."""
