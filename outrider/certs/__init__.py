"""Development certificates: an authority of one's own, and one certificate per part."""
