"""Jobs: transfers that workers perform."""
