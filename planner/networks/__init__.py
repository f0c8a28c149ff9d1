"""Where networks come from: the built-in zoo, Hugging Face configurations, Python factories."""

from planner.networks.inputs import InputSpec
from planner.networks.loading import NetworkSummary, list_networks, load_network
from planner.networks.network import Network, capture

__all__ = ["InputSpec", "Network", "NetworkSummary", "capture", "list_networks", "load_network"]
