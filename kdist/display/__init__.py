"""What people see: tables that fit the terminal, pictures, and which notices are kept off it."""
