//! Figures as a reader gets them: values at their places, words that touch nothing.

use crate::text::{bold_width, bytes, short, width, wrapped};
use crate::*;

fn figure(marks: Vec<Marks>, x: Scale, y: Scale) -> Figure {
    let panel = |marks| Panel {
        title: "a <panel> & \"more\"".to_owned(),
        x: Axis::new("block size, bytes", x),
        y: Axis::new("MB/s", y),
        marks,
    };
    Figure {
        name: "a".to_owned(),
        title: "Throughput <of> it".to_owned(),
        subtitle: "modelled".to_owned(),
        columns: 2,
        panels: marks.into_iter().map(panel).collect(),
        reads: "Higher is better.".to_owned(),
        hides: "Latency.".to_owned(),
    }
}

fn every_kind(value: f64) -> Vec<Marks> {
    let spread = |median: f64| Spread::of(&[median * 0.9, median, median * 1.2]).unwrap();
    let line = vec![(512.0, spread(value)), (4096.0, spread(value * 3.0))];
    let names = ["depth 1".to_owned(), "depth 32".to_owned()];
    vec![
        Marks::Lines(vec![
            Series::new("ours", line.clone()).emphasised(vec![(0, "a first note".to_owned())]),
            Series::new("theirs", line.clone()).ranked(0.5),
        ]),
        Marks::Dots(vec![Series::new("ours", vec![(1.0, value), (2.0, 2.0)])]),
        Marks::Bars {
            groups: names.to_vec(),
            series: vec![
                Series::new("ours", vec![Some(spread(value)), None]),
                Series::new("theirs", vec![None, Some(spread(value * 2.0))]),
            ],
        },
        Marks::Stacked {
            bars: names.to_vec(),
            parts: vec![
                Series::new("user", vec![value, 1.0]),
                Series::new("kernel", vec![2.0, value]),
            ],
        },
    ]
}

/// Returns the values of an attribute, in order.
fn numbers(xml: &str, element: &str, name: &str) -> Vec<f64> {
    let tags = xml.split('<').filter(|tag| tag.starts_with(element));
    let value = |tag: &str| {
        tag.split(&format!(" {name}=\""))
            .nth(1)?
            .split('"')
            .next()?
            .parse()
            .ok()
    };
    tags.filter_map(value).collect()
}

/// Returns the colours of the bars.
fn fills(xml: &str) -> Vec<String> {
    let tags = xml.split("<rect ").skip(1);
    let tags = tags.filter(|tag| !tag.contains("#FFFFFF"));
    let fill = |tag: &str| {
        tag.split("fill=\"")
            .nth(1)?
            .split('"')
            .next()
            .map(str::to_owned)
    };
    tags.filter_map(fill).collect()
}

/// Returns left, right, top and bottom of all horizontal text, with its words.
fn boxes(xml: &str) -> Vec<([f64; 4], &str)> {
    let tags = xml
        .split("<text ")
        .skip(1)
        .filter(|tag| !tag.contains("transform="));
    let one = |tag| {
        let words = <str>::split(tag, '\n').nth(1).unwrap_or_default();
        let number = |name| numbers(&format!("<text {tag}"), "text", name)[0];
        let (x, y, size) = (number("x"), number("y"), number("font-size"));
        let wide = match tag.contains("\"bold\"") {
            true => bold_width(words, size) * 0.97,
            false => width(words, size) * 0.97,
        };
        let left = match tag {
            tag if tag.contains("\"middle\"") => x - wide / 2.0,
            tag if tag.contains("\"end\"") => x - wide,
            _ => x,
        };
        let top = if tag.contains("dy=\"0.76em\"") {
            y
        } else {
            y - size / 2.0
        };
        ([left, left + wide, top, top + size * 0.9], words)
    };
    tags.map(one).collect()
}

/// Asserts that no two texts touch, and that none leaves the picture.
fn check_words(xml: &str) {
    let boxes = boxes(xml);
    for (number, (one, words)) in boxes.iter().enumerate() {
        assert!(
            one[0] >= 0.0 && one[1] <= f64::from(crate::draw::WIDTH),
            "{words} is cut off"
        );
        for (other, others) in &boxes[number + 1..] {
            let is_apart = one[1] <= other[0]
                || other[1] <= one[0]
                || one[3] <= other[2]
                || other[3] <= one[2];
            assert!(is_apart, "{words} touches {others}: {one:?} {other:?}");
        }
    }
}

#[test]
fn every_kind_of_mark_is_drawn_with_words_that_do_not_touch() {
    let text = svg(&figure(every_kind(7.0), Scale::Bytes, Scale::Log10));
    check_words(&text);
    // Two lines of two points, two bars, two bars of two parts.
    assert_eq!(text.matches("class=\"tip\"").count(), 4 + 2 + 4);
    for words in [
        "Higher is better.",
        "modelled",
        "a first note",
        "MB/s (log)",
    ] {
        assert!(text.contains(words), "{words}");
    }
    assert!(text.contains("a &lt;panel&gt; &amp; &quot;more&quot;"));
    assert_eq!(
        text,
        svg(&figure(every_kind(7.0), Scale::Bytes, Scale::Log10))
    );
}

#[test]
fn a_picture_has_a_name_and_its_caption_as_description() {
    let mut figure = figure(every_kind(7.0), Scale::Bytes, Scale::Log10);
    let text = svg(&figure);
    let (tag, rest) = text.split_once(">\n").unwrap();
    assert!(tag.starts_with("<svg ") && !tag.contains('>'));
    let names = "<title>Throughput &lt;of&gt; it</title>\n\
        <desc>How to read: Higher is better. Not shown: Latency.</desc>\n";
    assert!(rest.starts_with(names), "{}", &rest[..200]);
    (figure.reads, figure.hides) = (String::new(), String::new());
    assert!(!svg(&figure).contains("<desc>"));
}

#[test]
fn words_can_be_read_on_a_small_screen() {
    let text = svg(&figure(every_kind(7.0), Scale::Bytes, Scale::Log10));
    let sizes = numbers(&text, "text", "font-size");
    let scale = 380.0 / numbers(&text, "svg", "width")[0];
    let least = sizes.into_iter().fold(f64::MAX, f64::min);
    assert!(least * scale > 6.0, "{least}");
}

#[test]
fn many_series_and_long_names_do_not_touch() {
    let names = (0..9).map(|number| format!("a controller of a long name {number}"));
    let names: Vec<String> = names.collect();
    let spread = Spread::of(&[90_000.0, 123_456.0, 150_000.0]);
    let all = names
        .iter()
        .map(|name| Series::new(name, vec![spread; 9]))
        .collect();
    let bars = Marks::Bars {
        groups: names.clone(),
        series: all,
    };
    let parts = names
        .iter()
        .map(|name| Series::new(name, vec![1.0; 9]))
        .collect();
    let figure = figure(
        vec![bars, Marks::Stacked { bars: names, parts }],
        Scale::Linear,
        Scale::Linear,
    );
    check_words(&svg(&figure));
}

#[test]
fn a_subject_has_its_colour_whatever_stands_beside_it() {
    let spread = Spread::of(&[7.0]);
    let bars = |names: &[&str]| {
        let series = names.iter();
        let series = series
            .map(|name| Series::new(*name, vec![spread]))
            .collect();
        let marks = Marks::Bars {
            groups: vec!["depth 1".to_owned()],
            series,
        };
        fills(&svg(&figure(vec![marks], Scale::Linear, Scale::Linear)))
    };
    let alone = bars(&["SPDK", "Cleave adaptive"]);
    let crowded = bars(&["cleave poll", "theirs", "cleave adaptive", "others", "SPDK"]);
    assert_eq!(alone, [crowded[4].clone(), crowded[2].clone()]);
    let sorted: std::collections::BTreeSet<&String> = crowded.iter().collect();
    assert_eq!(sorted.len(), 5, "{crowded:?}");
}

#[test]
fn a_part_has_its_colour_whether_or_not_another_was_measured() {
    let last = |names: &[&str]| {
        let parts = names.iter().map(|name| Series::new(*name, vec![7.0]));
        let marks = Marks::Stacked {
            bars: vec!["a".to_owned()],
            parts: parts.collect(),
        };
        let all = fills(&svg(&figure(vec![marks], Scale::Linear, Scale::Linear)));
        all.last().cloned()
    };
    let all = last(&["guest", "VMM", "backend, user", "backend, kernel"]);
    assert_eq!(all, last(&["guest", "VMM", "backend, kernel"]));
    assert_ne!(all, last(&["backend, user"]));
}

#[test]
fn a_bar_without_a_name_of_its_own_has_the_colour_of_the_name_below_it() {
    let named = |names: &[&str], series: &str| {
        let spread = Spread::of(&[7.0]);
        let marks = Marks::Bars {
            groups: names.iter().map(|name| (*name).to_owned()).collect(),
            series: vec![Series::new(series, vec![spread; names.len()])],
        };
        fills(&svg(&figure(vec![marks], Scale::Linear, Scale::Linear)))
    };
    let own = named(&["AHCI", "cleave adaptive"], "a <panel> & \"more\"");
    assert_eq!(own[1], named(&["depth 1"], "cleave adaptive")[0]);
    assert_ne!(own[0], own[1]);
}

#[test]
fn a_legend_of_bars_has_squares_and_one_of_lines_has_lines() {
    let spread = Spread::of(&[7.0]).unwrap();
    let names = ["bare fio", "cleave adaptive", "qemu-storage-daemon"];
    let line = |name| Series::new(name, [1.0, 2.0, 4.0].map(|x| (x, spread)).to_vec());
    let bars = Marks::Bars {
        groups: vec!["depth 1".to_owned()],
        series: names
            .map(|name| Series::new(name, vec![Some(spread)]))
            .to_vec(),
    };
    let drawn = |marks| svg(&figure(vec![marks], Scale::Linear, Scale::Linear));
    let (bars, lines) = (drawn(bars), drawn(Marks::Lines(names.map(line).to_vec())));
    // Two of the three are circles where they are points of a line, and the third is a triangle.
    let corners = |xml: &str| -> Vec<usize> {
        let points = xml.split("<polygon").skip(1);
        let points = points.filter_map(|tag| tag.split("points=\"").nth(1)?.split('"').next());
        points
            .map(|points| points.split_whitespace().count())
            .collect()
    };
    assert_eq!((corners(&bars), corners(&lines)), (vec![4; 3], vec![3; 4]));
    // A piece of line for each entry, and the lines themselves.
    assert_eq!(lines.matches("stroke-width=\"2\"").count(), 3 + 3);
    assert_eq!(bars.matches("stroke-width=\"2\"").count(), 0);
}

#[test]
fn bars_are_as_long_as_their_values() {
    let text = svg(&figure(
        every_kind(10.0).split_off(2),
        Scale::Linear,
        Scale::Linear,
    ));
    // The background and four marks of legends come first.
    let bars = |height: &f64| *height > 20.0 && *height < 300.0;
    let heights: Vec<f64> = numbers(&text, "rect", "height")
        .into_iter()
        .filter(bars)
        .collect();
    assert_eq!(heights.len(), 2 + 4 - 1, "one part is short");
    assert!((heights[1] / heights[0] - 2.0).abs() < 0.03, "{heights:?}");
}

#[test]
fn points_lie_where_their_values_are() {
    let line = [1.0, 2.0, 4.0].map(|x| (x, Spread::of(&[8.0 / x]).unwrap()));
    let marks = Marks::Lines(vec![Series::new("a", line.to_vec())]);
    let text = svg(&figure(vec![marks], Scale::Log2, Scale::Linear));
    let places = |name| numbers(&text, "circle class=\"tip\"", name);
    let (xs, ys) = (places("cx"), places("cy"));
    assert!((xs[2] - 2.0 * xs[1] + xs[0]).abs() <= 1.0, "{xs:?}");
    assert!(
        ((ys[1] - ys[0]) - 2.0 * (ys[2] - ys[1])).abs() <= 2.0,
        "{ys:?}"
    );
}

/// Returns the ends of the lines of a colour: x and y of the one, x and y of the other.
fn lines(xml: &str, colour: &str) -> Vec<[f64; 4]> {
    let lines = xml.split("<polyline").skip(1);
    let lines = lines.filter(|tag| tag.contains(&format!("stroke=\"{colour}\"")));
    let points = lines.filter_map(|tag| tag.split("points=\"").nth(1)?.split('"').next());
    let ends = points.filter_map(|points| {
        let all = points.split([' ', ',']);
        let all: Vec<f64> = all.filter_map(|word| word.parse().ok()).collect();
        all.try_into().ok()
    });
    ends.collect()
}

/// Returns the x of each whisker of a bar.
fn whiskers(xml: &str) -> Vec<f64> {
    let lines = lines(xml, "#000000").into_iter();
    let upright = lines.filter(|[x, _, to_x, _]| x == to_x);
    upright.map(|[x, ..]| x).collect()
}

#[test]
fn a_median_stands_at_the_end_of_its_bar_beside_the_whisker() {
    let spread = Spread::of(&[1000.0, 1234.0, 2000.0]);
    let bars = |count: usize| {
        let groups = (0..count).map(|number| number.to_string()).collect();
        let series = vec![Series::new("a", vec![spread; count])];
        let mut figure = figure(
            vec![Marks::Bars { groups, series }],
            Scale::Linear,
            Scale::Linear,
        );
        figure.columns = 1;
        svg(&figure)
    };
    let level = bars(5);
    let (tops, found) = (numbers(&level, "rect", "y"), whiskers(&level));
    assert_eq!(found.len(), 5);
    // One that is seen on a dark bar has a white edge.
    let edge = level.find("stroke=\"#FFFFFF\" stroke-width=\"3\"");
    assert!(edge < level.find("stroke=\"#000000\" stroke-width=\"1\""));
    assert!(edge.is_some());
    let medians = boxes(&level)
        .into_iter()
        .filter(|(_, words)| *words == "1234");
    let medians: Vec<[f64; 4]> = medians.map(|(own, _)| own).collect();
    assert_eq!(medians.len(), 5);
    for (own, x) in medians.iter().zip(&found) {
        assert!(
            own[3] < tops[1] && tops[1] - own[3] < 8.0,
            "{own:?} {tops:?}"
        );
        assert!(own[1] <= x - 3.0, "{own:?} touches the whisker at {x}");
    }
    let upright = bars(20);
    let (tops, found) = (numbers(&upright, "rect", "y"), whiskers(&upright));
    let words: Vec<&str> = upright.split("<text ").collect();
    let words = words
        .into_iter()
        .filter(|tag| tag.contains("rotate(270") && tag.contains("\n1234\n"));
    let places: Vec<[f64; 3]> = words
        .map(|tag| {
            ["x", "y", "font-size"].map(|name| numbers(&format!("<text {tag}"), "text", name)[0])
        })
        .collect();
    assert_eq!(places.len(), 20);
    for ([x, y, size], whisker) in places.into_iter().zip(found) {
        assert!(y < tops[1] && tops[1] - y < 8.0, "{y} {tops:?}");
        assert!(
            x + size / 2.0 < whisker,
            "{x} touches the whisker at {whisker}"
        );
    }
}

#[test]
fn names_that_would_touch_stand_upright() {
    let names = ["IDE (PIIX3)", "MegaRAID SAS", "virtio-blk in QEMU"];
    let names: Vec<String> = (0..13).map(|at| names[at % 3].to_owned()).collect();
    let spread = Spread::of(&[7.0]);
    let marks = Marks::Bars {
        series: vec![Series::new("a", vec![spread; names.len()])],
        groups: names,
    };
    let text = svg(&figure(vec![marks], Scale::Linear, Scale::Linear));
    check_words(&text);
    let upright = text
        .split("<text ")
        .filter(|tag| tag.contains("rotate(270"));
    let upright: Vec<&str> = upright.filter(|tag| tag.contains("MegaRAID SAS")).collect();
    assert_eq!(upright.len(), 4);
    // It ends below the axis and begins above the label.
    let number = |name| numbers(&format!("<text {}", upright[0]), "text", name)[0];
    let begin = number("y") + width("MegaRAID SAS", number("font-size"));
    let label = boxes(&text);
    let label = label
        .iter()
        .find(|(_, words)| *words == "block size, bytes");
    assert!(begin < label.unwrap().0[2], "{begin} {label:?}");
}

#[test]
fn two_points_are_not_joined_and_lie_beside_those_of_others() {
    let line = |name: &str, xs: &[f64]| {
        let points = xs.iter().map(|x| (*x, Spread::of(&[*x]).unwrap()));
        Series::new(name, points.collect())
    };
    let drawn = |xs: &[f64]| {
        let marks = Marks::Lines(vec![
            line("bare fio", xs).shaded_to("cleave adaptive"),
            line("cleave adaptive", xs),
        ]);
        svg(&figure(vec![marks], Scale::Linear, Scale::Linear))
    };
    let (two, three) = (drawn(&[2.0, 20.0]), drawn(&[2.0, 8.0, 20.0]));
    let lines = |xml: &str| xml.matches("stroke-width=\"2\"").count();
    // Two in the legend, and two in the panel.
    assert_eq!((lines(&two), lines(&three)), (0, 4));
    let bands = |xml: &str| xml.matches("opacity=\"0.2\"").count();
    assert_eq!((bands(&two), bands(&three)), (0, 1));
    let xs = |xml: &str| numbers(xml, "circle class=\"tip\"", "cx");
    assert!(xs(&two)[2] - xs(&two)[0] > 5.0, "{:?}", xs(&two));
    assert_eq!(xs(&three)[..3], xs(&three)[3..]);
}

#[test]
fn a_band_lies_between_two_lines_and_behind_them() {
    let line = |values: [f64; 3]| {
        let points = [1.0, 2.0, 4.0].into_iter().zip(values);
        points
            .map(|(x, y)| (x, Spread::of(&[y]).unwrap()))
            .collect()
    };
    let marks = Marks::Lines(vec![
        Series::new("low", line([1.0, 4.0, 2.0])).shaded_to("high"),
        Series::new("high", line([3.0, 3.0, 3.0])),
        Series::new("apart", line([5.0, 6.0, 7.0])).shaded_to("absent"),
    ]);
    let text = svg(&figure(vec![marks], Scale::Log2, Scale::Linear));
    let places = ["cx", "cy"].map(|name| numbers(&text, "circle class=\"tip\"", name));
    let corner = |at: usize| format!("{},{}", places[0][at], places[1][at]);
    let band = [0, 1, 2, 5, 4, 3].map(corner).join(" ");
    assert_eq!(text.matches("opacity=\"0.2\"").count(), 1);
    let band = text.find(&format!("points=\"{band}")).expect("its corners");
    let mark = text.find(&format!("<circle cx=\"{}\"", places[0][0]));
    assert!(band < mark.expect("the first point"));
}

#[test]
fn a_note_touches_no_line() {
    let row =
        |rate: f64| (0..8).map(move |log| (f64::from(1 << log), Spread::of(&[rate]).unwrap()));
    let rates = (1..20)
        .map(f64::from)
        .filter(|rate| !(9.0..=12.0).contains(rate));
    let mut series: Vec<Series<_>> = rates
        .map(|rate| Series::new(format!("{rate}"), row(rate).collect()))
        .collect();
    series[7] = Series::new("8", row(8.0).collect())
        .emphasised(vec![(3, "a note of some length".to_owned())]);
    let mut figure = figure(vec![Marks::Lines(series)], Scale::Log2, Scale::Linear);
    figure.columns = 1;
    let text = svg(&figure);
    let notes = boxes(&text)
        .into_iter()
        .filter(|(_, words)| words.starts_with("a note"));
    let [_, _, top, bottom] = notes.map(|(own, _)| own).next().expect("there is room");
    let tips = numbers(&text, "circle class=\"tip\"", "cy");
    assert!(
        tips.iter().all(|y| *y < top || *y > bottom),
        "{top} {bottom} {tips:?}"
    );
}

#[test]
fn the_line_from_a_note_to_its_point_crosses_no_other_note() {
    // Rates of a disk that gains from up to 32 requests, with one to many of them for each number of bytes in flight.
    let rate = |all: i32, own: i32| {
        let (requests, bytes) = (2_f64.powi(all - own).min(32.0), 2_f64.powi(own));
        let rate = requests * bytes / (80.0 + bytes / 1100.0);
        (
            bytes,
            Spread::of(&[rate * 0.97, rate, rate * 1.03]).unwrap(),
        )
    };
    let row = |all: i32| {
        let points = (9..=all).map(|own| rate(all, own));
        let series = Series::new(format!("{all}"), points.collect());
        match all {
            19 => series.emphasised(vec![
                (10, "1 × 512 KiB: 950 MB/s".to_owned()),
                (5, "32 × 16 KiB: 5534 MB/s".to_owned()),
            ]),
            _ => series.ranked(0.5),
        }
    };
    let rows = (9..=22).map(row).collect();
    let mut figure = figure(vec![Marks::Lines(rows)], Scale::Bytes, Scale::Linear);
    figure.columns = 1;
    let text = svg(&figure);
    let notes = boxes(&text).into_iter();
    let notes: Vec<_> = notes.filter(|(_, words)| words.contains(" × ")).collect();
    assert_eq!(notes.len(), 2);
    let ends = lines(&text, "#666666").into_iter();
    for [from_x, from_y, to_x, to_y] in ends {
        for ([left, right, top, bottom], words) in &notes {
            let is_within = |step: i32| {
                let part = f64::from(step) / 100.0;
                let (x, y) = (
                    from_x + (to_x - from_x) * part,
                    from_y + (to_y - from_y) * part,
                );
                (left + 1.0..right - 1.0).contains(&x) && (top + 1.0..bottom - 1.0).contains(&y)
            };
            assert!(!(0..=100).any(is_within), "a line crosses {words}");
        }
    }
}

#[test]
fn odd_values_and_nothing_at_all_are_still_figures() {
    let scales = [Scale::Linear, Scale::Log10, Scale::Log2, Scale::Bytes];
    for value in [0.0, -1.0, 1e-9, 1e12, 1e300, f64::NAN, f64::INFINITY] {
        for scale in scales {
            let text = svg(&figure(every_kind(value), scale, scale));
            assert!(!text.contains("NaN") && text.ends_with("</svg>\n"));
        }
    }
    let nothing = vec![
        Marks::Lines(Vec::new()),
        Marks::Dots(vec![Series::new("a", Vec::new())]),
        Marks::Bars {
            groups: Vec::new(),
            series: Vec::new(),
        },
    ];
    let text = svg(&figure(nothing, Scale::Linear, Scale::Log10));
    assert_eq!(text.matches("nothing was measured").count(), 3);
    assert!(svg(&figure(Vec::new(), Scale::Linear, Scale::Linear)).ends_with("</svg>\n"));
}

#[test]
fn ticks_are_round() {
    let table = [
        (Scale::Linear, [3.0, 880.0], "0 200 400 600 800"),
        (Scale::Linear, [0.2, 1.3], "0 0.5 1"),
        (Scale::Log10, [30.0, 900.0], "50 100 200 500 1000"),
        (Scale::Log10, [1.0, 50_000.0], "1 10 100 1000 10k"),
        (Scale::Log10, [3.0, 4.0], "3 3.5 4"),
        (Scale::Log2, [1.0, 16.0], "1 2 4 8 16"),
        (Scale::Bytes, [512.0, 4096.0], "512 1K 2K 4K"),
    ];
    for (scale, values, ticks) in table {
        let (bottom, top) = (190, 0);
        let ruler = Axis::new("", scale).ruler(&values, 0.04, bottom..top);
        let found = plotters::prelude::Ranged::key_points(&ruler, 0);
        let found: Vec<String> = found.into_iter().map(|place| scale.tick(place)).collect();
        assert_eq!(found.join(" "), ticks, "{scale:?} {values:?}");
    }
}

#[test]
fn a_narrow_logarithm_keeps_its_decades() {
    let ruler = Axis::new("", Scale::Log10).ruler(&[200.0, 48_000.0], 0.04, 0..146);
    let ticks = plotters::prelude::Ranged::key_points(&ruler, 0);
    let words = ticks.into_iter().map(|place| Scale::Log10.tick(place));
    assert_eq!(words.collect::<Vec<String>>(), ["1000", "10k"]);
}

#[test]
fn numbers_and_lines_are_short() {
    let table = [
        (0.0, "0"),
        (0.052, "0.052"),
        (7.5, "7.5"),
        (950.0, "950"),
        (1234.0, "1234"),
        (12_000.0, "12k"),
        (999_900.0, "1M"),
        (2_742_000.0, "2.74M"),
        (-3.0, "-3"),
    ];
    for (value, words) in table {
        assert_eq!(short(value), words);
    }
    assert_eq!([512.0, 4096.0, 1_048_576.0].map(bytes), ["512", "4K", "1M"]);
    assert!(width("ill", 10.0) < width("mmm", 10.0) / 2.0);
    assert_eq!(wrapped("aa bb cc", 10.0, 40), ["aa bb", "cc"]);
    assert_eq!(wrapped("aa-bbb-cc d", 10.0, 38), ["aa-", "bbb-cc", "d"]);
}

#[test]
fn the_median_lies_in_the_middle() {
    let of = |values: &[f64]| Spread::of(values).map(|s| [s.median, s.min, s.max]);
    assert_eq!(of(&[9.0, 1.0, 2.0]), Some([2.0, 1.0, 9.0]));
    assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), Some([2.5, 1.0, 4.0]));
    assert_eq!(of(&[]), None);
}
