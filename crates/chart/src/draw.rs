//! The page of a figure: titles, legend, a place for each panel, caption.

use std::fmt::Write as _;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::figure::{Figure, Marks, Panel, Series};
use crate::legend::{Legend, LegendMark, legend, legend_rows, part_legend};
use crate::style::{GREY, SHAPES, Style, VERMILION};
use crate::text::{self, bold_wrapped, escaped, printable, width, wrapped};

/// As wide as a page on a small screen allows: at 380 pixels the words are still seven high.
pub(crate) const WIDTH: i32 = 680;
const MARGIN: i32 = 18;
const GAP: i32 = 26;
/// More panels than these do not stand side by side.
const COLUMNS_MAX: usize = 2;
/// Between lines of text.
const LEAD: i32 = 17;
/// Between rows of a legend.
const ROW: i32 = 20;
/// Between lines of a name below bars.
pub(crate) const NAME_LEAD: i32 = 15;
/// Room for the numbers and the label of the y axis.
pub(crate) const LEFT: i32 = 64;
/// Room on the right of the axes, for half of the last number of the x axis.
pub(crate) const RIGHT: i32 = 12;
pub(crate) const FAMILY: &str = "DejaVu Sans, Verdana, sans-serif";
/// The SVG backend divides sizes by this.
pub(crate) const FONT_SCALE: f64 = 1.24;
pub(crate) type DrawResult<T> = Result<T, DrawingAreaErrorKind<std::io::Error>>;
pub(crate) type Position = (i32, i32);

/// Size, weight and colour of a text.
#[derive(Clone, Copy)]
pub(crate) struct Font(pub(crate) f64, FontStyle, RGBColor);

const TITLE: Font = Font(17.0, FontStyle::Bold, BLACK);
const SUBTITLE: Font = Font(12.5, FontStyle::Normal, GREY);
const HEADING: Font = Font(14.0, FontStyle::Bold, BLACK);
pub(crate) const BODY: Font = Font(text::CAPTION, FontStyle::Normal, BLACK);
pub(crate) const SMALL: Font = Font(text::TICK, FontStyle::Normal, BLACK);
pub(crate) const VALUE: Font = Font(11.0, FontStyle::Normal, BLACK);
pub(crate) const NOTE: Font = Font(13.0, FontStyle::Bold, VERMILION);

/// A panel's outer box, and its axes' height.
pub(crate) struct PanelBox {
    pub(crate) x: i32,
    pub(crate) y: i32,
    pub(crate) width: i32,
    pub(crate) above: i32,
    pub(crate) plot: i32,
    pub(crate) below: i32,
}

/// Returns the boxes of the panels, in fewer columns where names need the room, and where the caption begins.
fn layout(figure: &Figure, mut y: i32) -> (Vec<PanelBox>, i32) {
    let width = |columns: usize| {
        let columns = columns as i32;
        (WIDTH - 2 * MARGIN - GAP * (columns - 1)) / columns
    };
    let fits = |columns: &usize| {
        figure
            .panels
            .iter()
            .all(|panel| names_fit(panel, width(*columns)))
    };
    let columns = (1..=figure.columns.clamp(1, COLUMNS_MAX))
        .rev()
        .find(fits)
        .unwrap_or(1);
    let width = width(columns);
    let plot = |panel: &Panel| match (&panel.marks, columns) {
        (Marks::Lines(_), 1) => 320,
        (_, 1) => 210,
        _ => 190,
    };
    let mut cells = Vec::new();
    for row in figure.panels.chunks(columns) {
        let most = |of: &dyn Fn(&Panel) -> i32| row.iter().map(of).max().unwrap_or(0);
        let above = most(&|panel| above(panel, width));
        let (plot, below) = (most(&plot), most(&|panel| below(panel, width)));
        for column in 0..row.len() as i32 {
            let x = MARGIN + column * (width + GAP);
            cells.push(PanelBox {
                x,
                y,
                width,
                above,
                plot,
                below,
            });
        }
        y += above + plot + below + 14;
    }
    (cells, y + 16)
}

fn above(panel: &Panel, room: i32) -> i32 {
    let lines = bold_wrapped(&panel.title, HEADING.0, room - 12).len() as i32;
    let rows = match &panel.marks {
        Marks::Stacked { parts, .. } => legend_rows(&part_legend(parts), room).len() as i32,
        _ => 0,
    };
    14 + LEAD * lines + ROW * rows
}

fn below(panel: &Panel, room: i32) -> i32 {
    let (Marks::Bars { groups, .. } | Marks::Stacked { bars: groups, .. }) = &panel.marks else {
        return 44;
    };
    let room = room - LEFT - RIGHT;
    let label = if panel.x.label.is_empty() { 0 } else { 22 };
    let names = match has_upright_names(groups, room) {
        true => {
            let widths = groups.iter().map(|name| width(name, SMALL.0));
            8 + widths.fold(0.0, f64::max) as i32
        }
        false => {
            let lines = |name: &String| name_lines(name, room, groups.len()).len() as i32;
            NAME_LEAD * groups.iter().map(lines).max().unwrap_or(1)
        }
    };
    8 + names + label
}

/// Returns true if no name under a group of bars reaches into the next.
fn names_fit(panel: &Panel, room: i32) -> bool {
    let (Marks::Bars { groups, .. } | Marks::Stacked { bars: groups, .. }) = &panel.marks else {
        return true;
    };
    !has_upright_names(groups, room - LEFT - RIGHT)
}

/// Returns true if a name under a group of bars would reach into the next, and has to stand upright where more room cannot be had.
pub(crate) fn has_upright_names(groups: &[String], room: i32) -> bool {
    let each = f64::from(room / groups.len().max(1) as i32);
    let mut lines = groups
        .iter()
        .flat_map(|name| name_lines(name, room, groups.len()));
    lines.any(|line| width(&line, SMALL.0) > each)
}

/// Returns the name under one of `count` groups of bars.
pub(crate) fn name_lines(name: &str, room: i32, count: usize) -> Vec<String> {
    wrapped(name, SMALL.0, room / count.max(1) as i32 - 4)
}

/// Returns the figure as complete XML, with no reference to anything outside.
pub fn svg(figure: &Figure) -> String {
    let room = WIDTH - 2 * MARGIN;
    let legend = legend(figure);
    let title = bold_wrapped(&figure.title, TITLE.0, room);
    let subtitle = wrapped(&figure.subtitle, SUBTITLE.0, room);
    let captions = captions(figure);
    let lines = captions.iter();
    let lines = lines.flat_map(|words| wrapped(words, BODY.0, room));
    let caption: Vec<String> = lines.collect();
    let under_titles = 36 + 22 * title.len() as i32 + LEAD * subtitle.len() as i32;
    let rows = legend_rows(&legend, room).len() as i32;
    let rows = if legend.len() > 1 { rows } else { 0 };
    let under_legend = under_titles + ROW * rows - if rows > 0 { 2 } else { 10 };
    let (cells, end) = layout(figure, under_legend);
    let height = end + LEAD * caption.len() as i32;
    let (mut text, mut tips) = (String::new(), String::new());
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32));
        let mut page = Page {
            root: root.into_drawing_area(),
            legend,
            tips: &mut tips,
        };
        let mut draw = || -> DrawResult<()> {
            page.root.fill(&WHITE)?;
            page.lines((MARGIN, 30), 22, TITLE, &title)?;
            page.lines(
                (MARGIN, 30 + 22 * title.len() as i32),
                LEAD,
                SUBTITLE,
                &subtitle,
            )?;
            if rows > 0 {
                page.entries(&page.legend, (MARGIN, under_titles), room)?;
            }
            for (panel, cell) in figure.panels.iter().zip(&cells) {
                let heading = bold_wrapped(&panel.title, HEADING.0, cell.width - 12);
                page.lines((cell.x + 8, cell.y + 14), LEAD, HEADING, &heading)?;
                page.panel(panel, cell)?;
            }
            page.lines((MARGIN, end), LEAD, BODY, &caption)?;
            page.root.present()
        };
        // A string takes all that is written to it.
        let _ = draw();
    }
    let text = text.replacen(">\n", &format!(">\n{}", names(figure, &captions)), 1);
    text.replace("</svg>", &format!("{tips}</svg>"))
}

/// Returns the sentences below the panels.
fn captions(figure: &Figure) -> Vec<String> {
    let words = [
        ("How to read: ", &figure.reads),
        ("Not shown: ", &figure.hides),
    ];
    let words = words.iter().filter(|(_, words)| !words.is_empty());
    let words = words.map(|(head, words)| format!("{head}{}.", words.trim_end_matches('.')));
    words.collect()
}

/// Returns name and description of the picture, for a program that reads it aloud.
fn names(figure: &Figure, captions: &[String]) -> String {
    let title = escaped(&figure.title);
    match captions {
        [] => format!("<title>{title}</title>\n"),
        _ => format!(
            "<title>{title}</title>\n<desc>{}</desc>\n",
            escaped(&captions.join(" "))
        ),
    }
}

/// The drawing of one figure: its area, its legend and its hover texts.
pub(crate) struct Page<'a> {
    pub(crate) root: DrawingArea<SVGBackend<'a>, Shift>,
    pub(crate) legend: Legend,
    /// Invisible circles with words that appear under the pointer.
    tips: &'a mut String,
}

impl Page<'_> {
    fn lines(&self, (x, y): Position, lead: i32, font: Font, lines: &[String]) -> DrawResult<()> {
        let mut lines = lines.iter().zip(0..);
        lines.try_for_each(|(line, number)| {
            self.text((x, y + lead * number), font, HPos::Left, line)
        })
    }

    /// Draws one line of text; the place is on its baseline.
    pub(crate) fn text(
        &self,
        at: Position,
        font: Font,
        anchor: HPos,
        words: &str,
    ) -> DrawResult<()> {
        let Font(size, weight, colour) = font;
        let font = FontDesc::new(FontFamily::Name(FAMILY), size * FONT_SCALE, weight);
        let style = TextStyle::from(font)
            .color(&colour)
            .pos(Pos::new(anchor, VPos::Top));
        // The backend moves a text with this anchor down by 0.76 em.
        let top = at.1 - (size * 0.76).round() as i32;
        self.root.draw_text(&printable(words), &style, (at.0, top))
    }

    /// Draws a line of text that goes up from a place (left), or up to it (right).
    pub(crate) fn upright(
        &self,
        at: Position,
        font: Font,
        anchor: HPos,
        words: &str,
    ) -> DrawResult<()> {
        let Font(size, weight, colour) = font;
        let font = FontDesc::new(FontFamily::Name(FAMILY), size * FONT_SCALE, weight);
        let style = TextStyle::from(font.transform(FontTransform::Rotate270))
            .color(&colour)
            .pos(Pos::new(anchor, VPos::Center));
        self.root.draw_text(&printable(words), &style, at)
    }

    fn entries(&self, legend: &Legend, (left, top): Position, room: i32) -> DrawResult<()> {
        for (row, y) in legend_rows(legend, room)
            .iter()
            .zip((top..).step_by(ROW as usize))
        {
            for (x, entry) in row {
                let at = (left + x, y - 4);
                self.entry_mark(at, entry.mark, entry.style)?;
                let at = (at.0 + entry.mark.width(), y);
                self.text(at, BODY, HPos::Left, &entry.name)?;
            }
        }
        Ok(())
    }

    fn entry_mark(&self, (x, y): Position, mark: LegendMark, style: Style) -> DrawResult<()> {
        let large = Style { size: 5.0, ..style };
        match mark {
            LegendMark::Square => self.mark((x + 6, y), Style { shape: 1, ..large }),
            LegendMark::Point => self.mark((x + 6, y), large),
            LegendMark::Line => {
                self.path(vec![(x, y), (x + 26, y)], style.colour, style.stroke)?;
                self.mark((x + 13, y), style)
            }
        }
    }

    /// Draws the legend of a stacked panel above its axes.
    pub(crate) fn parts(&self, parts: &[Series<f64>], cell: &PanelBox) -> DrawResult<Legend> {
        let legend = part_legend(parts);
        let rows = legend_rows(&legend, cell.width).len() as i32;
        self.entries(
            &legend,
            (cell.x + 8, cell.y + cell.above - ROW * rows + 6),
            cell.width,
        )?;
        Ok(legend)
    }

    pub(crate) fn style(&self, name: &str) -> Style {
        let own = self.legend.iter().find(|entry| entry.name == name);
        own.map_or_else(|| Style::of_bar(name), |entry| entry.style)
    }

    pub(crate) fn mark(&self, (x, y): Position, style: Style) -> DrawResult<()> {
        let filled = style.colour.filled();
        let of = |share: &f64| (share * style.size).round() as i32;
        let corners = SHAPES[style.shape]
            .iter()
            .map(|(dx, dy)| (x + of(dx), y + of(dy)));
        match style.shape {
            0 => self
                .root
                .draw(&Circle::new((x, y), style.size as i32, filled)),
            _ => self
                .root
                .draw(&Polygon::new(corners.collect::<Vec<Position>>(), filled)),
        }
    }

    pub(crate) fn path(
        &self,
        places: Vec<Position>,
        colour: RGBColor,
        stroke: u32,
    ) -> DrawResult<()> {
        self.root
            .draw(&PathElement::new(places, colour.stroke_width(stroke)))
    }

    pub(crate) fn tip(&mut self, (x, y): Position, words: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.tips,
            "<circle class=\"tip\" cx=\"{x}\" cy=\"{y}\" r=\"6\" fill-opacity=\"0\"><title>{}</title></circle>",
            escaped(words)
        );
    }
}
