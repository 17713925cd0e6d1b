"""The interactive page: state without widgets, charts without state, and the widgets that join them."""
