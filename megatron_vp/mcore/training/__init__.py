"""What runs in the place of Megatron's pipeline schedule: the user's step captured, and its chunks driven."""
