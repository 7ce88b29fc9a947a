"""What nights read, their records, promotion, notification."""
