"""``npurun check``: the ranks examine their hosts, links and collectives, and rank 0 prints what it means."""
