"""Common English words, so that the tokenizer's vocabulary holds more than the task's own.

A tokenizer trained on the task alone would have few more than a thousand tokens, and any other text would fall to
pieces.
"""

from __future__ import annotations

PROSE = """
a about above across act add after again against age ago agree air all allow almost alone along already also although
always am among an and animal another answer any anything appear are area arm around arrive as ask at away back bad
ball base be bear beat beautiful became because become bed been before began begin behind believe below best better
between big bird black boat body book both bottom bought bring brought build burn busy but buy by call came can car
care carry case catch cause cell center century certain chance change check child children choose city class clean
clear climb close cloud coast cold color come common complete consider contain continue control cook cool copy corn
correct cost could count country course cover create cross cry cut dark day dead deal decide deep degree depend
describe desert design develop did die difference different difficult direct discover divide do doctor does dog done
door double down draw dream dress drink drive drop dry during each ear early earth east easy eat edge effect egg eight
either else end energy engine enough enter equal even evening event ever every exact example except excite exercise
expect experience explain eye face fact fall family famous far farm fast father fear feed feel feet few field fight
figure fill final find fine finger finish fire first fish fit five flat floor flow flower fly follow food foot for
force forest form forward found four free fresh friend from front fruit full fun game garden gave general gentle get
girl give glad go good got govern grass great group grow guess had hair half hand happen happy hard has hat have he
head hear heart heat heavy held help her here high hill him his history hit hold hole home hope horse hot hour house
how huge human hundred hunt hurry ice idea if imagine in inch include increase indicate industry instead interest into
invent island is it its job join joy jump just keep kind king knew know land language large last late laugh law lay
learn least leave left leg length less let letter level lie life lift light like line list listen little live local
locate log look lost lot loud love low machine made magnet main major make man many map mark market mass master match
material matter may me mean measure meat meet melody men method middle might mile milk million mind mine minute miss
modern moment money month moon more morning most mother motion mountain mouth move much multiply music must my name
nation natural nature near necessary neck need never new next night nine no noise noon nor north nose note nothing
notice noun now number object observe ocean of off offer office often oil on once one only open operate opposite or
order other our out over own oxygen page pair part particular party pass past path pattern pay people perhaps period
person picture piece place plain plan plane planet plant play please point poor populate port pose position possible
post pound power practice prepare present press pretty print probable problem process produce product proper protect
prove provide pull push put question quick quite race radio rain raise ran range rather reach read ready real reason
receive record region remember repeat reply represent require rest result rich ride right rise river road rock roll
room root rope rule run safe sail salt same sand sat save saw say school science score sea search season seat second
section see seed seem select self sell send sense sent sentence separate serve set settle seven several shall shape
share sharp she sheet shine ship shoe shop shore short should shoulder shout show side sight sign silent similar
simple since sing single sister sit six size skill skin sky sleep slip slow small smell smile snow so soft soil solve
some son song soon sound south space speak special speed spell spend spoke spot spread spring square stand star start
state station stay stead steam step stick still stone stood stop store story straight strange stream street stretch
string strong student study subject substance success such sudden sugar suggest suit summer sun supply support sure
surface surprise swim symbol system table tail take talk tall teach team teeth tell ten term test than thank that the
their them then there these they thick thin thing think third this those though thought thousand three through time
tire to together told tone too took tool top total touch toward town track trade train travel tree triangle trip
trouble truck true try turn twelve twenty two type under unit until up us use usual valley value vary verb very view
village visit voice wait walk wall want war warm was wash watch water wave way we wear weather week weight well went
were west what wheel when where whether which while who whole whose why wide wild will win wind window winter wire
wish with wonder wood word work world would write written wrong yard year yellow yes yet you young your The And Where
When Which What How Who Why It Is In On At He She We You They This That There These Those If For From But
"""
