"""What a worker of either tier is made of besides its core."""
