"""The coordinator: enrols devices, offers bundles, takes updates and turns the rounds."""
