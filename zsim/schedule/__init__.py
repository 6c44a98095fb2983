"""The schedule: operations, layouts, groups; a builder, validation, order, and its form in JSON."""
