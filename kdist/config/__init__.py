"""What the user declares: frozen dataclasses and settings of layers, validated once."""
