"""Small commands beside training and serving: `quartet tools NAME`."""
