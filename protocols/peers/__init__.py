"""What a node knows of its peers.

Which version they speak, whether they live, what rules they broke, how diverse they are.
"""
