"""The stage ``regranulate`` of topkv: selected tokens become the larger units that hold them."""
