"""aimed at: one_f_one_b: legal. Forgets that m may be smaller than p."""


def one_f_one_b(p, m):
    t, rows = lab.reference, []
    for s in range(p):
        warm = 2 * (p - s) - 1 if t["doubled"] else p - s
        row = [f"{s}F{k}" for k in range(warm)]
        for k in range(m):
            row.append(f"{s}B{k}")
            if warm + k < m:
                row.append(f"{s}F{warm + k}")
        rows.append(row)
    return rows[::-1] if t["reverse"] else rows
