//! Which disks are on the screen: their order, the selected one, and whether it is shown alone.

use std::cmp::Ordering;
use std::ops::Range;

use cleave_api::natural;

use super::keys::Key;
use super::rates::Rates;
use super::screen::{HEAD, Row};

/// A column to sort by, where its head is, and how large a disk is there. Texts are sorted by themselves.
struct Column {
    head: &'static str,
    of: fn(&Rates) -> f64,
}

/// The columns with numbers, in their order. The first column is the name.
const COLUMNS: &[Column] = &[
    Column {
        head: "read/s",
        of: |rates| rates.reads,
    },
    Column {
        head: "write/s",
        of: |rates| rates.writes,
    },
    Column {
        head: "MB/s",
        of: |rates| rates.bytes,
    },
    Column {
        head: "p50 us",
        of: |rates| rates.p50_us.unwrap_or(-1.0),
    },
    Column {
        head: "p99 us",
        of: |rates| rates.p99_us.unwrap_or(-1.0),
    },
    Column {
        head: "spin%",
        of: |rates| rates.spin,
    },
    Column {
        head: "CPU%",
        of: |rates| rates.cpu,
    },
];

/// A socket's place among those that are asked, and the id of a disk behind it.
pub(super) type Name = (usize, String);

/// The state of the view.
#[derive(Debug, Default)]
pub(super) struct DiskTable {
    /// 0: the name; else one more than the place in [`COLUMNS`]. `None`: as the sockets have them.
    sorted_by: Option<usize>,
    is_reversed: bool,
    selected: Option<Name>,
    is_open: bool,
    first: usize,
    /// How many rows were on the screen.
    page: usize,
}

/// A row with its name; a socket without an answer has the id "".
pub(super) type Named<'a> = (Name, Row<'a>);

impl DiskTable {
    /// Does what a key says; the rows are those on the screen, in their order.
    pub(super) fn press(&mut self, key: Key, rows: &[Named<'_>]) {
        let page = self.page.max(1) as isize;
        match key {
            Key::Quit => {}
            Key::Up => self.step(-1, rows),
            Key::Down => self.step(1, rows),
            Key::PageUp => self.step(-page, rows),
            Key::PageDown => self.step(page, rows),
            Key::First => self.step(isize::MIN, rows),
            Key::Last => self.step(isize::MAX, rows),
            Key::Left => self.sort(COLUMNS.len()),
            Key::Right => self.sort(1),
            Key::Reverse => self.is_reversed = !self.is_reversed,
            Key::Open => {
                if self.place(rows).is_none() {
                    self.step(0, rows);
                }
                self.is_open = self.selected.is_some();
            }
            Key::Close => match self.is_open {
                true => self.is_open = false,
                false => self.selected = None,
            },
        }
    }

    fn step(&mut self, by: isize, rows: &[Named<'_>]) {
        let last = rows.len().saturating_sub(1);
        let to = match self.place(rows) {
            Some(at) => at.saturating_add_signed(by).min(last),
            // The first key shows where the selection is.
            None if by == isize::MAX => last,
            None => 0,
        };
        self.selected = rows.get(to).map(|(name, _)| name.clone());
    }

    /// So many columns further.
    fn sort(&mut self, by: usize) {
        let columns = COLUMNS.len() + 1;
        self.sorted_by = Some(match self.sorted_by {
            None if by == 1 => 1,
            now => (now.unwrap_or(0) + by) % columns,
        });
    }

    /// Puts the rows into their order: the largest numbers first, names from A.
    pub(super) fn arrange(&self, rows: &mut [Named<'_>]) {
        let Some(by) = self.sorted_by else {
            if self.is_reversed {
                rows.reverse();
            }
            return;
        };
        let column = by.checked_sub(1).and_then(|at| COLUMNS.get(at));
        rows.sort_by(|(a_name, a), (b_name, b)| {
            let order = match column {
                Some(column) => number(column, b).total_cmp(&number(column, a)),
                None => Ordering::Equal,
            };
            order.then_with(|| (natural(&a_name.1), a_name.0).cmp(&(natural(&b_name.1), b_name.0)))
        });
        if self.is_reversed {
            rows.reverse();
        }
    }

    fn place(&self, rows: &[Named<'_>]) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        rows.iter().position(|(name, _)| name == selected)
    }

    /// The place of the disk that is shown alone. One that is gone is not.
    pub(super) fn opened(&mut self, rows: &[Named<'_>]) -> Option<usize> {
        let place = self.place(rows);
        self.is_open &= place.is_some();
        place.filter(|_| self.is_open)
    }

    /// The rows that fit on the screen, the selected one among them, and its place among those.
    pub(super) fn window(
        &mut self,
        rows: &[Named<'_>],
        lines: usize,
    ) -> (Range<usize>, Option<usize>) {
        // Below the head.
        let page = rows.len().min(lines.saturating_sub(1));
        self.page = page;
        let selected = self.place(rows);
        if let Some(at) = selected {
            self.first = self.first.min(at).max((at + 1).saturating_sub(page));
        }
        self.first = self.first.min(rows.len() - page.min(rows.len()));
        let shown = self.first..(self.first + page).min(rows.len());
        let at = selected.filter(|at| shown.contains(at));
        (shown.clone(), at.map(|at| at - shown.start))
    }

    /// Where the head of the column is by which the rows are sorted.
    pub(super) fn head(&self) -> Option<Range<usize>> {
        let head = match self.sorted_by?.checked_sub(1) {
            None => "disk",
            Some(at) => COLUMNS.get(at)?.head,
        };
        let start = HEAD.find(head)?;
        Some(start..start + head.len())
    }
}

fn number(column: &Column, row: &Row<'_>) -> f64 {
    match row {
        Row::Disk(_, rates) => rates.as_ref().map_or(0.0, column.of),
        Row::Away(_) | Row::Gone(..) => f64::NEG_INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::super::rates::tests::report;
    use super::*;
    use cleave_api::DiskReport;

    fn rows(reports: &[DiskReport]) -> Vec<Named<'_>> {
        let row = |(at, report): (usize, &'_ DiskReport)| {
            let rates = Rates {
                reads: (at * 37 % 100) as f64,
                p99_us: (at % 2 == 0).then_some(at as f64),
                ..Rates::default()
            };
            (report.id.clone(), rates)
        };
        let rates: Vec<_> = reports.iter().enumerate().map(row).collect();
        let each = reports.iter().zip(rates);
        each.map(|(report, (id, rates))| ((0, id), Row::Disk(report, Some(rates))))
            .collect()
    }

    fn ids<'a>(rows: &'a [Named<'_>]) -> Vec<&'a str> {
        rows.iter().map(|((_, id), _)| id.as_str()).collect()
    }

    fn hundred() -> Vec<DiskReport> {
        let id = |at: u32| format!("d{}", (at * 7) % 100);
        (0..100).map(|at| report(&id(at), 5.0, 5, &[])).collect()
    }

    #[test]
    fn a_hundred_disks_are_sorted_by_any_column() {
        let reports = hundred();
        let mut table = DiskTable::default();
        let arranged = |table: &DiskTable| {
            let mut rows = rows(&reports);
            table.arrange(&mut rows);
            rows
        };
        assert_eq!(ids(&arranged(&table)), ids(&rows(&reports)));
        let mut heads = Vec::new();
        for column in 0..=COLUMNS.len() {
            table.press(Key::Right, &[]);
            let rows = arranged(&table);
            heads.push(&HEAD[table.head().unwrap()]);
            let Some(column) = COLUMNS.get(column) else {
                let all: Vec<String> = (0..100).map(|at| format!("d{at}")).collect();
                assert_eq!(ids(&rows), all);
                continue;
            };
            let numbers = rows.iter().map(|(_, row)| -number(column, row));
            assert!(numbers.is_sorted(), "{}", column.head);
        }
        let expected = [
            "read/s", "write/s", "MB/s", "p50 us", "p99 us", "spin%", "CPU%", "disk",
        ];
        assert_eq!(heads, expected);
        table.press(Key::Left, &[]);
        assert_eq!(&HEAD[table.head().unwrap()], "CPU%");
        table.press(Key::Reverse, &[]);
        assert_eq!(ids(&arranged(&table))[0], "d99");
    }

    #[test]
    fn the_selected_disk_stays_on_the_screen_and_selected_whatever_the_order() {
        let reports = hundred();
        let mut rows = rows(&reports);
        let mut table = DiskTable::default();
        assert_eq!(table.window(&rows, 23), (0..22, None));
        for (key, shown, at) in [
            (Key::Down, 0..22, 0),
            (Key::Up, 0..22, 0),
            (Key::PageDown, 1..23, 21),
            (Key::Last, 78..100, 21),
            (Key::Down, 78..100, 21),
            (Key::PageUp, 77..99, 0),
            (Key::First, 0..22, 0),
            (Key::Down, 0..22, 1),
        ] {
            table.press(key, &rows);
            assert_eq!(table.window(&rows, 23), (shown, Some(at)), "{key:?}");
        }
        let selected = rows[1].0.clone();
        table.press(Key::Reverse, &rows);
        table.arrange(&mut rows);
        let (shown, at) = table.window(&rows, 23);
        assert_eq!(rows[shown.start + at.unwrap()].0, selected);
        table.press(Key::Open, &rows);
        let open = table.opened(&rows).unwrap();
        assert_eq!(rows[open].0, selected);
        // It is removed meanwhile.
        rows.remove(open);
        assert_eq!(table.opened(&rows), None);
        assert_eq!(table.window(&rows, 200), (0..99, None));
        for lines in 0..4 {
            table.press(Key::Last, &rows);
            let (shown, _) = table.window(&rows, lines);
            assert!(shown.len() <= lines);
        }
        table.press(Key::Down, &[]);
        assert_eq!(table.window(&[], 24), (0..0, None));
    }
}
