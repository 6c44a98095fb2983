"""Parts that readers of trainers' configuration files share."""
