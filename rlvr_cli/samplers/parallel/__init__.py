"""Samplers in processes and servers of their own, one or several as one."""
