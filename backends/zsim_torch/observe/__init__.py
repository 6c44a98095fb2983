"""What a rank really does, seen below the executor: storages, operators, collectives."""
