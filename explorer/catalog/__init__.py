"""What ships with the package: models, as facts of their configs, and GPU cards. No torch, no transformers."""

from explorer.catalog.cards import Card, cards, find_card
from explorer.catalog.lengths import Lengths, image_tokens, lengths
from explorer.catalog.models import Model, catalog_name, find_model, models, own_model, stand_in

__all__ = ["Card", "Lengths", "Model", "cards", "catalog_name", "find_card", "find_model", "image_tokens", "lengths", "models", "own_model", "stand_in"]
