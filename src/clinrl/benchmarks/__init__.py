"""A model beside what others published: their protocol, and exams from elsewhere."""
