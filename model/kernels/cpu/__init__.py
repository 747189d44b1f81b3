"""Operations on a CPU."""
