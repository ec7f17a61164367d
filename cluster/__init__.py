"""Outrider on a Ray cluster: actors host the two services, Ray Serve runs the coordinators, a keeper knows them all."""
